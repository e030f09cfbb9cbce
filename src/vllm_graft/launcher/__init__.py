"""Starting vLLM: a server as a child process, and two models that need no hub.

server.py       ServerProcess: started, waited for, stopped, nothing left behind
models.py       embedded_model, tiny_model: folders that vLLM loads like any other model
model_files.py  the files of such a folder, and the manifest that reveals damage
smollm2.py      the recipe of the embedded model
tiny_llama.py   the recipe of the tiny one
"""
