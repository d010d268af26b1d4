"""The error of a grammar that cannot be used; its text is for the client."""


class SchemaRefused(ValueError):
    """A schema asks for what a text cannot be held to. The sentence goes on from "it" or a path."""
