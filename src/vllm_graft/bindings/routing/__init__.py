"""The router point: choose the experts of mixture-of-experts layers of any model that vLLM has.

=====================  ===============================================================================================
``patches``            the two constructors through which every such layer passes, and the worker's load of the model
``planned_router``     the layers that get the planned router: given when made, tried once loaded, refused or proven
``routed_layer``       the router of one layer: its calls counted, its answers checked, and the way back to stock
``vllm_router``        that as an object of vLLM's ``BaseRouter``
``engine_arguments``   engines that cannot have a router at all
=====================  ===============================================================================================
"""
