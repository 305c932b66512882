"""The replay: trace x scenario -> outcomes and timeline, a discrete-event simulation per engine step.

`docs/replay.md` states exactly what is simulated. One concept per file: `pool` (KV blocks and prefix cache; its
arrays in `segments`), `chains` (which prefix a block stands for), `scheduler`
(one step's batch), `speculation` (which drafts are accepted), `router` (which replica), `timeline`, `engine` (the loop).
"""
