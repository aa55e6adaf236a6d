"""Other engines that decode by lenience's rules."""
