//! A macro for lists of kinds: enums whose variants have a name for the command line and a
//! description.

macro_rules! kinds {
    (
        $(#[$attribute:meta])*
        pub enum $Kind:ident;
        $($kind:ident $name:literal $what:literal;)*
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $Kind {
            $(#[doc = $what] $kind,)*
        }

        impl $Kind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the name of the kind.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }

            /// Returns a description of the kind.
            #[must_use]
            pub fn what(self) -> &'static str {
                match self { $(Self::$kind => $what,)* }
            }

            /// Returns the kind with this name.
            ///
            /// # Errors
            /// If no kind has this name, with a list of all names.
            pub fn named(name: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|kind| kind.name() == name);
                let names: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
                found
                    .copied()
                    .ok_or_else(|| format!("expected one of {}", names.join(", ")))
            }
        }
    };
}

pub(crate) use kinds;
