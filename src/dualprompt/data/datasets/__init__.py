"""One file a dataset; each registers itself with `dualprompt.data.sources.DATASETS`."""
