"""The model point: register architectures in vLLM, and check, load and prove their classes.

==================  ==================================================================================================
``planned_models``  the architectures of this process: registered, refused on a clash, proven once a worker built one
``interface``       a class compared with what the installed vLLM calls on a model
``weights``         the names of a checkpoint's weights: mapped, and followed for the error that names one
``patches``         vLLM's inspection of a class, and the worker's load of the model
==================  ==================================================================================================
"""
