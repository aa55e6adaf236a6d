"""Other engines that decode by our rules."""
