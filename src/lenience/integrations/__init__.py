"""Other engines that decode by our rules. They know core, heads and rules, and none of ours."""
