"""How the processes of a run share it, as its files say: DeepSpeed's ZeRO and FSDP."""
