//! JSON, checked against the table that documents it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs;
use std::path::Path;

use serde_json::Value;

/// The fields of a kind of JSON: their paths with their types.
pub struct Schema(Vec<(String, String)>);

impl Schema {
    /// The table below a heading of a page of the guide: a field, its type and its meaning in each row.
    pub fn of(page: &str, heading: &str) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide").join(page);
        let text = fs::read_to_string(file).unwrap();
        let (_, section) = text.split_once(&format!("\n## {heading}\n")).expect("the page has the heading");
        let section = section.split("\n## ").next().unwrap();
        let row = |line: &str| {
            let mut cells = line.strip_prefix("| `")?.split(" | ");
            Some((cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned()))
        };
        let rows: Vec<_> = section.lines().filter_map(row).collect();
        assert!(rows.len() > 5, "{rows:?}");
        Self(rows)
    }

    fn kind(&self, path: &str) -> &str {
        let row = path.strip_suffix("[]").unwrap_or(path);
        let found = self.0.iter().find(|(field, _)| field == row);
        &found.unwrap_or_else(|| panic!("{row} is not documented")).1
    }

    /// Checks that a value has all documented fields that are not optional, no others, and values of their types.
    pub fn check(&self, value: &Value) {
        self.check_at(value, "");
    }

    fn check_at(&self, value: &Value, path: &str) {
        match value {
            Value::Object(fields) => {
                let below = |field: &str| if path.is_empty() { field.into() } else { format!("{path}.{field}") };
                fields.iter().for_each(|(field, value)| self.check_at(value, &below(field)));
                for (row, kind) in self.0.iter().filter(|(_, kind)| !kind.contains("optional")) {
                    let (parent, field) = row.rsplit_once('.').unwrap_or(("", row));
                    assert!(parent != path || fields.contains_key(field), "{row} ({kind}) is not in {value}");
                }
            }
            Value::Array(values) => {
                assert!(self.kind(path).starts_with("list"), "{path}: {value}");
                values.iter().for_each(|value| self.check_at(value, &format!("{path}[]")));
            }
            Value::String(text) => {
                let kind = self.kind(path);
                let words: Vec<_> = kind.split('`').skip(1).step_by(2).collect();
                let fits = if words.is_empty() { kind.contains("string") } else { words.contains(&text.as_str()) };
                assert!(fits, "{path}: {text} is no {kind}");
            }
            Value::Bool(_) => assert!(self.kind(path).contains("boolean"), "{path}: {value}"),
            Value::Number(_) => assert!(self.kind(path).contains("number") && value.is_u64(), "{path}: {value}"),
            Value::Null => panic!("{path} is null"),
        }
    }
}
