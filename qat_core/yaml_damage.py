"""What PyYAML raises for a file that is no YAML. Imports nothing heavy: study files need it too."""

import yaml

# constructors of scalars, such as of a day that no month has, raise more than YAMLError
YAML_DAMAGE = (yaml.YAMLError, ValueError, AttributeError, KeyError, RecursionError)
