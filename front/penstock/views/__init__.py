"""The views of the commands: pictures, statistics and samples. Nothing here prints."""
