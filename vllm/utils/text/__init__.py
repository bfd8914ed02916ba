"""Process strings: shorten them for logs, read them as a stream, match them with patterns."""
