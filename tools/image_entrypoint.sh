#!/bin/sh
# What `docker run IMAGE ARGUMENTS` starts. Flags alone, or a model, are for the server, as with the
# images of vLLM; a command of a shell, of Python or for the cards is run as it is; otherwise the first
# argument is a subcommand of vllm.
case "${1-}" in
-h | --help | -v | --version) ;;
-* | "") set -- serve "$@" ;;
vllm) shift ;;
bash | sh | env | python | python3 | pip | ray | hl-smi | hf | /bin/* | /usr/*) exec "$@" ;;
*/*) set -- serve "$@" ;;
esac
exec vllm "$@"
