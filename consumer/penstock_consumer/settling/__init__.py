"""What was handed out and when it is acknowledged, and waits that can only end by that."""
