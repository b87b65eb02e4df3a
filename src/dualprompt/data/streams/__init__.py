"""One file a kind of stream; each registers itself with `dualprompt.data.stream.STREAMS`."""
