"""The rules of `penstock doctor`: pure functions from facts to findings, about servers, streams and queues."""
