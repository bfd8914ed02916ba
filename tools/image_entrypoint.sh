#!/bin/sh
# What `docker run IMAGE ARGUMENTS` starts. Flags alone are those of the server, as with the images
# of vLLM; otherwise the first argument is a subcommand of vllm.
case "${1-}" in
-h | --help | -v | --version) ;;
-* | "") set -- serve "$@" ;;
esac
exec vllm "$@"
