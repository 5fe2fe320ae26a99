"""Generated from protos/outrider/v1 by `make proto`. Do not edit."""
