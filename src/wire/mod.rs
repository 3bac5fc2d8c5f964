//! Protocol hygiene: what HTTP demands of any proxy, with no policy in it.

pub mod authority;
pub mod body;
pub mod cache_control;
pub mod credentials;
pub mod deadline_header;
pub mod event_stream;
pub mod framing;
pub mod grpc;
pub mod hop_by_hop;
pub mod incoming;
pub mod media_type;
pub mod outflow;
pub mod preference;
pub mod push_back;
pub mod replay;
pub mod retry_mark;
pub mod target;
pub mod websocket;
