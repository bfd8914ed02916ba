"""Images and sounds on their way to a request. No model of this version takes them yet."""
