"""The views of the commands: pictures, statistics and samples, without a line of printing."""
