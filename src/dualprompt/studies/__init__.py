"""Tables, figures and studies over finished runs."""

# Names of the studies; each is a module that has a STUDY, imported when it is asked for.
STUDIES = (
    "positions",
    "layers",
    "lengths",
    "prompting",
    "ablation",
    "matching",
    "buffers",
    "prompts-tsne",
    "diversity",
    "auto",
)
