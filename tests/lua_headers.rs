//! The headers of the Lua scripts say what the scripts do, and the Rust side knows the same codes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// One script, taken apart.
struct Script {
    name: String,
    shebang: Option<String>,
    header: String,
    /// The code without comments.
    body: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn scripts() -> Vec<Script> {
    let mut files: Vec<_> =
        fs::read_dir(root().join("lua")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let scripts: Vec<_> = files.iter().map(|file| Script::read(file)).collect();
    assert!(scripts.len() >= 9, "five verbs, the readiness check, and what operators do");
    scripts
}

impl Script {
    fn read(file: &Path) -> Self {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.ends_with(".lua"), "{name}: only scripts are in lua/");
        let text = fs::read_to_string(file).unwrap();
        let shebang = text.starts_with("#!").then(|| text.lines().next().unwrap().to_owned());
        let rest = shebang.as_ref().map_or(&text[..], |line| &text[line.len() + 1..]);
        let rest = rest.strip_prefix("--[[ ");
        let rest = rest.unwrap_or_else(|| panic!("{name}: begins with its contract, --[["));
        let end =
            rest.find("\n]]\n").unwrap_or_else(|| panic!("{name}: the contract ends with ]]"));
        let body = rest[end + 4..]
            .lines()
            .map(|line| line.split_once("--").map_or(line, |(code, _)| code))
            .fold(String::new(), |body, line| body + line + "\n");
        Self { name, shebang, header: rest[..end].to_owned(), body }
    }

    /// The indices that are named in the header as `KEYS[n]` or `ARGV[n]`, each with its unit.
    fn promised(&self, array: &str) -> BTreeSet<usize> {
        let mut promised = BTreeSet::new();
        for line in self.header.lines() {
            let Some(rest) = line.trim().strip_prefix(&format!("{array}[")) else { continue };
            let (index, description) = rest.split_once("]  ").unwrap_or_else(|| {
                panic!("{}: two blanks after the index, in {line:?}", self.name)
            });
            let has_unit = description.contains('(') && description.ends_with(')');
            assert!(has_unit, "{}: a unit in parentheses, in {line:?}", self.name);
            assert!(promised.insert(index.parse().unwrap()), "{}: twice, {line:?}", self.name);
        }
        promised
    }

    fn used(&self, array: &str) -> BTreeSet<usize> {
        let start = format!("{array}[");
        let parts = self.body.split(&start).skip(1);
        parts.map(|part| part.split_once(']').unwrap().0.parse().unwrap()).collect()
    }

    /// Code and name of each line after `Returns`.
    fn promised_codes(&self) -> BTreeMap<i64, String> {
        let (_, returns) = self
            .header
            .split_once("\n  Returns  ")
            .unwrap_or_else(|| panic!("{}: the header lists what is returned", self.name));
        let mut codes = BTreeMap::new();
        for line in returns.lines() {
            let line = line.trim().trim_start_matches("| ");
            let (code, meaning) = line.split_once(' ').unwrap();
            let name = meaning.split(',').next().unwrap().to_owned();
            let old = codes.insert(code.parse().unwrap(), name);
            assert!(old.is_none(), "{}: code {code} is listed twice", self.name);
        }
        codes
    }

    fn returned_codes(&self) -> BTreeSet<i64> {
        let parts = self.body.split("return ").skip(1);
        parts
            .map(|part| {
                let table = part.strip_prefix('{').unwrap_or_else(|| {
                    panic!("{}: returns a table that begins with its code: {part:?}", self.name)
                });
                let code = table.split([',', '}']).next().unwrap();
                code.parse().unwrap_or_else(|_| panic!("{}: {code:?} is no code", self.name))
            })
            .collect()
    }

    fn calls(&self) -> Vec<&str> {
        let parts = self.body.split("redis.call('").skip(1);
        parts.map(|part| part.split_once('\'').unwrap().0).collect()
    }

    /// What the Rust side calls the codes of this script: `complete_large.lua` is `CompleteLargeCode`.
    fn known_codes(&self) -> BTreeMap<i64, String> {
        let rust = fs::read_to_string(root().join("src/store/redis/script.rs")).unwrap();
        let words = self.name.trim_end_matches(".lua").split('_');
        let verb: String = words.map(|word| word[..1].to_uppercase() + &word[1..]).collect();
        let table = format!("\n    {verb}Code {{");
        let (_, rest) = rust
            .split_once(&table)
            .unwrap_or_else(|| panic!("script.rs has no table {}", table.trim()));
        let (entries, _) = rest.split_once('}').unwrap();
        let entries = entries.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        entries
            .map(|entry| {
                let (name, code) = entry.split_once(" = ").unwrap();
                (code.parse().unwrap(), in_words(name))
            })
            .collect()
    }
}

/// `NotHeld` is "not held".
fn in_words(name: &str) -> String {
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}

#[test]
fn the_header_says_what_the_script_is_for_and_why_it_is_one_script() {
    for script in scripts() {
        let first = script.header.lines().next().unwrap();
        assert!(first.ends_with('.'), "{}: a sentence, not {first:?}", script.name);
        assert!(script.header.contains("One script, "), "{}: why one script", script.name);
    }
}

#[test]
fn every_key_and_argument_that_is_named_is_used_and_the_other_way_round() {
    for script in scripts() {
        for array in ["KEYS", "ARGV"] {
            let promised = script.promised(array);
            assert_eq!(promised, script.used(array), "{}: {array}", script.name);
            let dense = promised.iter().copied().eq(1..=promised.len());
            assert!(dense, "{}: {array} without gaps", script.name);
        }
    }
}

#[test]
fn every_script_has_exactly_one_key_but_for_the_one_that_fetches_a_large_response() {
    for script in scripts() {
        // The second key has the hash tag of the first, and is gone when the script has run.
        let keys = if script.name == "complete_large.lua" { 1..=2 } else { 1..=1 };
        assert_eq!(script.used("KEYS"), BTreeSet::from_iter(keys), "{}", script.name);
        assert!(!script.body.contains("#KEYS"), "{}", script.name);
        for call in script.body.split("redis.call(").skip(1) {
            let arguments: Vec<_> = call.split(',').map(str::trim).collect();
            let of_time = arguments[0].starts_with("'TIME')");
            let on_key = arguments
                .get(1)
                .is_some_and(|first| first.starts_with("key") || first.starts_with("beside"));
            assert!(of_time || on_key, "{}: calls only on its key: {call:?}", script.name);
        }
    }
}

#[test]
fn every_code_is_listed_returned_and_known() {
    for script in scripts() {
        let promised = script.promised_codes();
        let codes: BTreeSet<_> = promised.keys().copied().collect();
        assert_eq!(codes, script.returned_codes(), "{}: listed and returned", script.name);
        assert_eq!(promised, script.known_codes(), "{}: listed and known", script.name);
        assert!(codes.iter().copied().eq(1..=codes.len() as i64), "{}: no gaps", script.name);
    }
}

#[test]
fn every_table_of_codes_has_its_script() {
    let rust = fs::read_to_string(root().join("src/store/redis/script.rs")).unwrap();
    let tables = rust.matches("Code {").count();
    assert_eq!(tables, scripts().len(), "one table per script");
}

#[test]
fn what_has_to_end_may_exceed_the_memory_limit_and_a_claim_may_not() {
    for script in scripts() {
        let expected = match script.name.as_str() {
            "claim.lua" | "ready.lua" => None,
            // The server itself keeps it from writing.
            "look.lua" => Some("#!lua flags=no-writes"),
            _ => Some("#!lua flags=allow-oom"),
        };
        assert_eq!(script.shebang.as_deref(), expected, "{}", script.name);
    }
}

#[test]
fn the_clock_is_read_once_and_before_anything_else() {
    for script in scripts() {
        let calls = script.calls();
        // A completion reads it if what it finds is not as the claim was granted.
        if !script.name.starts_with("complete") {
            assert_eq!(calls[0], "TIME", "{}: TIME comes first", script.name);
        }
        let count = calls.iter().filter(|&&call| call == "TIME").count();
        assert_eq!(count, 1, "{}: TIME once", script.name);
        let calls_in_any_form = script.body.matches("redis.call").count();
        assert_eq!(calls.len(), calls_in_any_form, "{}: no computed command", script.name);
        assert!(!script.body.contains("pcall"), "{}: errors are passed on", script.name);
    }
}

#[test]
fn a_script_reads_once_and_every_write_has_an_expiry() {
    for script in scripts() {
        let reads = script.calls().iter().filter(|&&call| call == "GET").count();
        assert!(reads <= 1, "{}: one look at the record", script.name);
        for call in script.body.split("redis.call(").skip(1) {
            if call.starts_with("'SET'") {
                let arguments = up_to_closing(call);
                let last_two = arguments.rsplit(',').take(2).map(str::trim).collect::<Vec<_>>();
                let expires = last_two[0] == "'KEEPTTL'" || last_two[1] == "'PX'";
                assert!(expires, "{}: SET without an expiry: {arguments}", script.name);
            }
        }
        let known: &[_] = match script.name.as_str() {
            "complete_large.lua" => &[
                "TIME",
                "STRLEN",
                "GETRANGE",
                "EXISTS",
                "UNLINK",
                "RENAME",
                "PEXPIRE",
                "PEXPIRETIME",
                "SETRANGE",
            ],
            "look.lua" => &["TIME", "PEXPIRETIME", "STRLEN", "GETRANGE"],
            // Whatever a request needs: see the test of that.
            "ready.lua" => continue,
            "forget.lua" => &["TIME", "GET", "PEXPIRETIME", "DEL"],
            "note.lua" => &["TIME", "XADD"],
            _ => &["TIME", "GET", "PEXPIRETIME", "SET"],
        };
        let calls = script.calls();
        if calls.contains(&"RENAME") {
            // A script that fails half-way is not undone: what replaces the record is whole by then.
            let last = &calls[calls.len() - 3..];
            assert_eq!(last, ["SETRANGE", "PEXPIRE", "RENAME"], "{}", script.name);
        }
        let unknown: Vec<_> = calls.into_iter().filter(|call| !known.contains(call)).collect();
        assert!(unknown.is_empty(), "{}: commands out of the ordinary: {unknown:?}", script.name);
    }
}

/// A right that is taken away shows in the readiness check, and not in the first payment.
#[test]
fn the_readiness_check_runs_every_command_that_a_request_needs() {
    // A service does without what is for operators.
    let for_operators = ["look.lua", "forget.lua", "amend.lua", "note.lua"];
    let scripts = scripts();
    let (ready, others): (Vec<_>, Vec<_>) =
        scripts.iter().partition(|script| script.name == "ready.lua");
    let tried: BTreeSet<_> = ready[0].calls().into_iter().collect();
    for script in others.iter().filter(|script| !for_operators.contains(&&*script.name)) {
        for call in script.calls() {
            assert!(tried.contains(call), "{}: {call} is not tried by ready.lua", script.name);
        }
    }
    assert_eq!(ready[0].calls().last(), Some(&"UNLINK"), "nothing is left");
    // And the guide, the README and the message name the same rights.
    let mut named: Vec<_> = tried.iter().map(|call| format!("+{}", call.to_lowercase())).collect();
    named.extend(["+eval".to_owned(), "+evalsha".to_owned()]);
    for file in ["README.md", "src/guide/redis.md", "src/store/redis/setup.rs"] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let list = text.split("+eval +evalsha").nth(1).unwrap_or_else(|| panic!("{file}: a list"));
        let list = list.split(['`', '"']).next().unwrap().replace('\\', " ");
        let listed: BTreeSet<_> = list.split_whitespace().chain(["+eval", "+evalsha"]).collect();
        assert_eq!(listed, named.iter().map(String::as_str).collect(), "{file}");
    }
}

/// The text before the parenthesis that closes one opened before the text.
fn up_to_closing(text: &str) -> &str {
    let mut open = 1;
    let end = text.find(|letter| {
        open += match letter {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        open == 0
    });
    &text[..end.expect("parentheses match")]
}

/// There are no includes, so the same lines stand in each script that changes a record in flight.
#[test]
fn the_times_of_a_first_claim_are_written_out_by_the_same_lines_everywhere() {
    let lines = |script: &Script| -> Option<Vec<String>> {
        let lines: Vec<_> = script.body.lines().map(str::trim).collect();
        let start = lines.iter().position(|&line| line == "if state == 6 or state == 7 then")?;
        Some(lines[start..start + 9].iter().map(|&line| line.to_owned()).collect())
    };
    let all: Vec<_> = scripts().iter().filter_map(lines).collect();
    assert_eq!(all.len(), 7, "claim, complete, complete_large, forget, release, renew, resolve");
    for other in &all {
        assert_eq!(*other, all[0]);
    }
}

#[test]
fn bodies_are_opaque_to_the_scripts() {
    for script in scripts() {
        for library in ["cjson", "cmsgpack", "bit.", "require", "loadstring"] {
            assert!(!script.body.contains(library), "{}: {library}", script.name);
        }
    }
}
