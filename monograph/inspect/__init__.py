"""What a user can look at: text of graphs and builds."""
