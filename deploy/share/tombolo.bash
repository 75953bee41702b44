# bash completion for tombolo, which writes it.
source <(tombolo completion bash)
