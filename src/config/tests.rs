//! The loader as a whole: defaults, fixtures, properties.

use super::*;

#[test]
fn the_embedded_policy_loads() {
    assert_eq!(embedded().upstreams.len(), 0);
}
