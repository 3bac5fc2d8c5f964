//! The downstream side: from an accepted socket to requests and tunnels.
//!
//! [`accept`] takes connections and bounds them; [`connection`] runs one, with [`downstream`] between
//! the socket and the HTTP library; [`forward`] takes a request to the journey and [`connect`] opens
//! tunnels, which [`tunnel`] then copies.

pub mod accept;
pub mod connect;
pub mod connection;
pub mod downstream;
pub mod forward;
pub mod sniff;
pub mod tunnel;
