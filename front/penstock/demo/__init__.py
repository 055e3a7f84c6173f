"""What `penstock demo` runs: real images, a costly Python transform, worker processes, two models on one stream.

It plays the user, so it may import any framework; nothing else imports it.
"""
