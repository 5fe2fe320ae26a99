"""The pair suite: what two models are worth to each other, predicted and measured."""
