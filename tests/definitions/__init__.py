"""The encodings by their definitions: plain float64 NumPy, written from the published formulas.

Never from the code under test, and in the clearest form there is: loops where they are clearest.
"""
