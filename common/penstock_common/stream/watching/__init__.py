"""What an onlooker sees: sizes, progress, what workers and trainers say of themselves."""
