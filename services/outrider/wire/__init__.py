"""Messages to values and back: conversion, handshake, errors, channel options."""
