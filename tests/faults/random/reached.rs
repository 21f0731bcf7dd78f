//! What a run has really met. One that claims a fault and never hit it has shown nothing.

use std::collections::{BTreeMap, BTreeSet};

/// How often each thing was met, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reached(BTreeMap<&'static str, u64>);

impl Reached {
    pub(crate) fn add(&mut self, name: &'static str, times: u64) {
        *self.0.entry(name).or_default() += times;
    }

    pub(crate) fn times(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// What is claimed and was never met.
    pub(crate) fn missing(&self, claimed: &BTreeSet<&'static str>) -> Vec<&'static str> {
        let met = |name: &&'static str| self.0.get(*name).is_some_and(|times| *times > 0);
        claimed.iter().copied().filter(|name| !met(name)).collect()
    }

    /// A line for each.
    pub(crate) fn lines(&self) -> String {
        let lines = self.0.iter().map(|(name, times)| format!("    {times:6}  {name}\n"));
        lines.collect()
    }
}

/// The sum of a series in a page of metrics, over its labels; of one label if it is named.
pub(crate) fn series(page: &str, name: &str, label: &str) -> u64 {
    let lines = page.lines().filter_map(|line| line.strip_prefix(name));
    let lines = lines.filter(|rest| rest.starts_with([' ', '{']) && rest.contains(label));
    let values = lines.filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let sum = values.sum::<f64>() as u64;
    sum
}

mod tests {
    use super::*;

    #[test]
    fn what_is_claimed_and_was_never_met_is_named() {
        let mut reached = Reached::default();
        reached.add("met", 2);
        reached.add("not met", 0);
        let claimed = ["met", "not met", "not heard of"].into();
        assert_eq!(reached.missing(&claimed), ["not heard of", "not met"]);
        reached.add("not met", 1);
        reached.add("not heard of", 1);
        assert_eq!(reached.missing(&claimed), [""; 0]);
    }

    #[test]
    fn a_series_is_summed_over_its_labels() {
        let page = "# TYPE a counter\na{x=\"1\"} 2\na{x=\"2\"} 3\na_b 7\nc 4\n";
        assert_eq!(series(page, "a", ""), 5);
        assert_eq!(series(page, "a", "x=\"2\""), 3);
        assert_eq!(series(page, "c", ""), 4);
        assert_eq!(series(page, "d", ""), 0);
    }
}
