"""Routes of the OpenAI API that are one file each."""
