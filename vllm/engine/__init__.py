"""Process requests from their arguments and prompts, through the step loop and its processes, to
their output text.
"""
