"""One file a method; each registers itself with `dualprompt.methods.base.METHODS`."""
