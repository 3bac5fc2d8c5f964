//! The policy's JSON Schema, derived from the structs that read it, so that the two cannot disagree.

use serde_json::Value;

use super::raw;

/// JSON Schema (2020-12) of the policy file, for editors and for checks without hedgerow.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(raw::Policy);
    schema.insert("title".into(), "hedgerow policy".into());
    schema.to_value()
}
