"""HTTP only: load and comparisons against any OpenAI endpoint. Imports none of the other packages."""
