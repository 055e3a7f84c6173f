"""The server itself: private ones, and whether one is fit to keep the promises."""
