"""The removal of epochs, of streams, and of files that belong to no stream."""
