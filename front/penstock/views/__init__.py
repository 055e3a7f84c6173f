"""The views of the commands: what to show of samples, streams and servers, as values. Nothing here prints."""
