"""What an engine has done, in numbers."""
