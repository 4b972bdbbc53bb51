"""Draft heads (EAGLE-1/2, EAGLE-3, Medusa, MTP): which public layout a folder holds, whether it fits, how it computes.

``files`` opens a folder or Hub id, ``layout`` says what it is, ``expect`` which tensors it must hold, ``fit`` why it
does not fit a target; none of them imports torch. ``load`` builds the modules, ``runner`` computes with a cache.
"""
