"""From requests to their outputs: arguments, tokens, the step loop and its processes, text."""
