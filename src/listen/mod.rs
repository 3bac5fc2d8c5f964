//! The downstream side: from an accepted socket to requests and tunnels.
//!
//! [`accept`] takes connections and bounds them; [`connection`] finds out which version of HTTP one
//! speaks, and [`http1`] (with [`downstream`] between the socket and the library) or [`http2`] runs it;
//! [`forward`] takes a request to the journey and [`connect`] opens tunnels. What is inside a tunnel is
//! [`sniff`]ed: requests are served, TLS may end here ([`intercept`]), and [`tunnel`] has the rest copied by [`relay`],
//! from a client that is [`vetted`] under an allow-list.
//! [`transparent`] takes connections that were redirected here.

pub mod accept;
pub mod connect;
pub mod connection;
pub mod downstream;
pub mod forward;
pub mod hello;
pub mod http1;
pub mod http2;
pub mod intercept;
pub mod relay;
pub mod sniff;
pub mod socket;
pub mod transparent;
pub mod tunnel;
pub mod vetted;
