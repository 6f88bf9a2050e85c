"""What weight sharing across positions gives: the counterfactual, trained and measured."""
