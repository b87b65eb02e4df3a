"""What changes a model: lessons, more images, other names, forgetting; and a look at images before they are learned."""
