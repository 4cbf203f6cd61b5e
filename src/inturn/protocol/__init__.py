"""The protocol: commands, answers, replies, codec, and the frames of a stream.

Producers and consumers send commands; nodes and servers send answers.
"""
