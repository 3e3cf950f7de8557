"""What makes the user's LightningModule and callbacks hold while its layers are on other ranks.

Names, stand-ins for layers that are elsewhere, patches of callbacks, and what is refused. Imports ``module`` alone
of this package. Open first: ``unsupported.py``.
"""
