"""Routes for monitoring and operating the server."""
