"""Pictures of samples: what to draw is decided in numpy (pictures), shown in a terminal (blocks) or as PNG (draw)."""
