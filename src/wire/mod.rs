//! Protocol hygiene: what HTTP demands of any proxy, with no policy in it.

pub mod authority;
pub mod deadline_header;
