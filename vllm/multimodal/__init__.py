"""Images and sounds for requests. No model of this version accepts them yet."""
