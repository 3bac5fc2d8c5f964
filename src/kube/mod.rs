//! Hedgerow into pods: the sidecar beside the agent, by a command or as the cluster makes the pod, and the rules that
//! lead there what knows of no proxy.
//!
//! Nothing of the proxy is used here: what is injected meets it in a container's arguments, what is redirected at a
//! port. Both are [`names`].

pub mod names;

pub mod inject;

pub mod redirect;

pub mod webhook;
